-- active: the active holders, and their version. It changes whenever a holder becomes active or ceases to be, so a client
-- asks again only then.
--
-- KEYS 1 active
--      2 meta
-- returns {version, {3-byte number, worker id...}}
register_read_only('kvatlas_active', function(keys)
  local active, meta = keys[1], keys[2]
  return { redis.call('HGET', meta, 'active') or '0', redis.call('HGETALL', active) }
end)
