"""Objects that engines keep, such as stored responses and files. A request for one goes to the worker that has it.

object_use.py      pure: the objects that a request names, and those that an answer creates
object_holders.py  which worker has each object, shared by the fleet's routers
known_holders.py   the holders that one process remembers
"""
