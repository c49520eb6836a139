"""Workers that fail while others don't: the routers of a pool count them and eject them together."""

from kvatlas.outliers.store import OutlierChange, OutlierRecord, OutlierStore, Verdict

__all__ = ["OutlierChange", "OutlierRecord", "OutlierStore", "Verdict"]
