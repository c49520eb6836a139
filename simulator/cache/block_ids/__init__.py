"""Caches by block ids alone, without token ids. Nothing else in kvatlas uses them."""
