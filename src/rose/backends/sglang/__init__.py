"""SGLang servers as ROSE serving engines, over HTTP. Importing this package imports neither sglang nor torch."""
