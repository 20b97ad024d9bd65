"""Sphinx: ``make docs`` builds the site into ``docs/_build/html``, without the network."""

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "revzoo"
author = "revzoo authors"
release = version_of("revzoo")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "reference",  # docs/_ext
]
exclude_patterns = ["_build", "_ext", "experiments.md"]  # the log is a file of the checkout

html_theme = "pydata_sphinx_theme"
html_title = "revzoo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "logo": {"text": f"revzoo {release}"},
}
if repository := os.environ.get("GITHUB_REPOSITORY"):  # owner/name, where GitHub builds the site
    html_theme_options["github_url"] = f"https://github.com/{repository}"
ALONE = "tutorial guide/models questions changelog contributing"
html_sidebars = {page: [] for page in ALONE.split()}  # their sections have no other page

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make test` executes the notebooks; their outputs are in the files

toc_object_entries = False
add_module_names = False  # every name of the API is an attribute of revzoo
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
# no file of the site: links into the checkout, as on GitHub
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
