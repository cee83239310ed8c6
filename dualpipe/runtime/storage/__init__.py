"""File operations for local directories and for object stores, which fsspec reaches by URLs such as s3://bucket/run.

Imports `runtime.files`.
"""
