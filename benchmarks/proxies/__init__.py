"""What a request through `kvatlas router` costs beside other proxies for engines: CPU time, in turns, on pinned cores."""
