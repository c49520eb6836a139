"""The engines' names in the index and in the fleet's records."""


def worker_name(engine: int) -> str:
    return f"w{engine:03}"
