"""The command line: one file per command, settings from `kvatlas.settings`, everything else in the packages that it calls."""
