-- prefilled: the first token is there, so the prompt is computed: the reservation queues nothing any more, and what it
-- predicted is held from now on.
-- KEYS: see _pool.lua   ARGV: id
-- returns 1; 0 where there is no such reservation, or it was told before
register('kvatlas_pool_prefilled', function(keys, args)
  local id, now = args[1], now_us()
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  local reservation = packed and cmsgpack.unpack(packed)
  if not reservation or reservation[6] ~= 1 then
    return 0
  end
  local record = get_worker(keys, reservation[1])
  count(record, reservation, -1)
  reservation[4], reservation[6] = 0, 0
  count(record, reservation, 1)
  put_worker(keys, reservation[1], record)
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  settle_prediction(keys, id, now)
  return 1
end)
