"""Objects that engines keep, such as stored responses and files: requests for them go where they are.

object_use.py      pure: the objects that a request names, and those that an answer brings
object_holders.py  which worker has them, shared by the fleet's routers
"""
