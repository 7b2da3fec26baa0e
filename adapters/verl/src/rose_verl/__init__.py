"""veRL with its rollouts on a ROSE pool. Importing this loads neither veRL nor torch; ``rose_verl.plugin`` is what veRL loads."""

__version__ = "0.1.0"
