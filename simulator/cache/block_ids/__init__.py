"""Caches that know only block ids, not token ids. Nothing else in kvatlas uses them."""
