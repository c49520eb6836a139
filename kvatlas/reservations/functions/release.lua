-- release: ends a reservation; again, or after it ended by itself, it changes nothing.
-- KEYS: see _pool.lua
-- ARGV: id, 'finished' | 'failed' | 'called_off', us for which a booking that was called off is refused should it come late
-- returns 1; 0 where there is no such reservation
register('kvatlas_pool_release', function(keys, args)
  local id, outcome, now = args[1], args[2], now_us()
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  local reservation = packed and cmsgpack.unpack(packed)
  if reservation and reservation[1] ~= '' then
    drop_reservation(keys, id, reservation, outcome == 'finished', now)
  end
  if outcome == 'called_off' then
    redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack({ '', '', 0, 0, 0, 0 }))
    redis.call('ZADD', keys[DEADLINES], string.format('%d', now + tonumber(args[3])), 'r' .. id)
    keep_shortly(keys)
  end
  return (reservation and reservation[1] ~= '') and 1 or 0
end)
