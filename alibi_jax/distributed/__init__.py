"""Devices and processes: the mesh, joining and stopping together, and memory."""
