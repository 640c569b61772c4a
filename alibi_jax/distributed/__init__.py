"""Devices and processes: the mesh, starting and stopping processes together, and memory."""
