"""What ROSE adds inside SGLang's own processes, loaded there as a plugin. Written for SGLang 0.5.23.

Importing this package imports neither sglang nor torch; ``plugin.register`` does, in SGLang's processes.
"""
