"""Workers that fail while others don't: the routers of a pool count them and eject them together."""

from kvatlas.ejection.store import EjectionChange, EjectionRecord, EjectionStore, Verdict

__all__ = ["EjectionChange", "EjectionRecord", "EjectionStore", "Verdict"]
