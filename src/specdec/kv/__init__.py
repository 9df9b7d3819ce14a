"""Paged keys and values: blocks, tables and storage."""
