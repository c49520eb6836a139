"""Workers that fail while others don't, as all routers of a pool count and eject them together."""

from kvatlas.outliers.store import OutlierChange, OutlierRecord, OutlierStore, Verdict

__all__ = ["OutlierChange", "OutlierRecord", "OutlierStore", "Verdict"]
