"""The `sluice` command: runs jobs here, shows those of clusters, reads data, translates launch
scripts of others.
"""
