-- prefilled: the first token is there, so the prompt is computed. The reservation queues nothing any more, and what it
-- predicted is held from now on.
--
-- KEYS see _pool.lua
-- ARGV 1 id
-- returns 1; 0 if there is no such reservation, or its first token was recorded before
register('kvatlas_pool_prefilled', function(keys, args)
  local id, now = args[1], now_us()
  local packed = redis.call('HGET', keys[RESERVATIONS], id)
  local reservation = packed and cmsgpack.unpack(packed)
  if not reservation or reservation[R_PREFILLING] ~= 1 then
    return 0
  end
  local worker = reservation[R_WORKER]
  local record = get_worker(keys, worker)
  count(record, reservation, -1)
  reservation[R_QUEUED], reservation[R_PREFILLING] = 0, 0
  count(record, reservation, 1)
  put_worker(keys, worker, record)
  redis.call('HSET', keys[RESERVATIONS], id, cmsgpack.pack(reservation))
  settle_prediction(keys, id, now)
  return 1
end)
