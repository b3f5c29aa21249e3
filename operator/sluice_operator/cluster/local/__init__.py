"""A laptop in place of a cluster: pods are processes, volumes are directories,
services are ports.
"""
