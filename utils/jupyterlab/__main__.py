"""Writes the extension into this environment."""

from utils.jupyterlab import install

install()
