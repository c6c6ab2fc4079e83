"""The configs of kernels: a table per architecture, and which one a device has."""
