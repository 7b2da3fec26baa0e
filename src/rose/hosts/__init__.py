"""Hosts: the processes that offer ROSE's parts to other processes and machines."""
