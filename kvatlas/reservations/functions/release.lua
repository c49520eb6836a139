-- release: ends a reservation. Again, or after the reservation ended by itself, it changes nothing.
--
-- KEYS see _pool.lua
-- ARGV 1 id
--      2 outcome (OUTCOME)
--      3 us for which a booking that was called off is refused should it come late
-- returns 1; 0 if there is no such reservation
register('kvatlas_pool_release', function(keys, args)
  local id, outcome, refused_us, now = args[1], args[2], tonumber(args[3]), now_us()
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  local reservation = packed and cmsgpack.unpack(packed)
  local booked = reservation and reservation[R_WORKER] ~= ''
  if booked then
    drop_reservation(keys, id, reservation, outcome == OUTCOME.finished, now)
  end
  if outcome == OUTCOME.called_off then
    redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack({ '', '', 0, 0, 0, 0 }))
    redis.call('ZADD', keys[DEADLINES], string.format('%d', now + refused_us), 'r' .. id)
    expire_without_workers(keys)
  end
  return booked and 1 or 0
end)
