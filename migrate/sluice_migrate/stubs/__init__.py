"""Stand-ins for the modules of slime and verl that a user's generate function imports.

Functions that were written for those projects ask their engine through a router or a server
manager; here that is the episode's own gateway. So the modules that know the way are replaced, in
the processes that load a user's code, and whatever else of the two packages is installed stays as
it is. Names and signatures are those of slime 0.3 and verl 0.9 and their main branches of autumn
2026.
"""
