"""A laptop as a cluster: pods are processes, volumes are directories, Services are ports."""
