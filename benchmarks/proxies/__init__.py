"""What a request through `kvatlas router` costs beside other proxies for engines: processor time, in turns, on pinned cores."""
