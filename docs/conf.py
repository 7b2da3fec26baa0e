"""Sphinx settings. The build treats every warning as an error and every unknown reference to ROSE as a warning."""

from importlib.metadata import version as distribution_version

project = "ROSE"
author = "The ROSE authors"
copyright = "2026, the ROSE authors"  # noqa: A001 - Sphinx's own name
release = distribution_version("rose-rl")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
# What is not ROSE's own is not looked up: a build needs no network. The ids are type aliases without pages.
autodoc_mock_imports = ["ray"]  # an extra that a build of the pages does not need
nitpick_ignore_regex = [("py:.*", r"(?!rose\.).*"), ("py:class", r"rose\.types\.\w+Id")]

html_theme = "furo"
html_title = "ROSE"
