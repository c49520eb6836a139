"""Objects that engines keep, such as stored responses and files. A request for such an object goes to the worker that
has it.

object_use.py      pure: finds the objects that a request names, and those that an answer creates
object_holders.py  finds the worker that has an object; shared by the fleet's routers
known_holders.py   the holders that one process remembers
"""
