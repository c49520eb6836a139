"""Fleet records: what each worker is and how it is, and where they are stored."""
