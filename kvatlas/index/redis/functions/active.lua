-- active: some of the active holders, and their version, which changes whenever a holder becomes active or stops being active.
-- Only then does a client have to ask again.
--
-- KEYS 1 active
--      2 meta
-- ARGV 1 cursor
--      2 count
-- returns {version, next cursor, {3-byte number, worker id...}}
register_read_only('kvatlas_active', function(keys, args)
  local active, meta, cursor, count = keys[1], keys[2], args[1], integer(args[2], 1, 1000)
  local next_cursor, flat = unpack(redis.call('HSCAN', active, cursor, 'COUNT', count))
  return { redis.call('HGET', meta, 'active') or '0', next_cursor, flat }
end)
