"""Readers of file formats. ``scan`` reads any of them."""

from gem_data.formats.scan import Scan, scan

__all__ = ["Scan", "scan"]
