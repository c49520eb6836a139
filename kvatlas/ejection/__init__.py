"""Workers that fail while others don't: a pool's routers count the failures together, and eject the workers together."""

from kvatlas.ejection.store import EjectionChange, EjectionRecord, EjectionStore, Verdict

__all__ = ["EjectionChange", "EjectionRecord", "EjectionStore", "Verdict"]
