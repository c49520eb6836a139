-- forget: deletes the record of a worker that is closed and holds nothing, if it still has this incarnation.
--
-- KEYS 1 workers
--      2 steps
-- ARGV 1 worker id
--      2 incarnation (8 bytes)
-- returns 1 or 0
register_always('kvatlas_forget', function(keys, args)
  local workers, steps, worker, incarnation = keys[1], keys[2], args[1], args[2]
  local packed = redis.call('HGET', workers, worker)
  if not packed then
    return 0
  end
  local record = cmsgpack.unpack(packed)
  if record[INCARNATION] ~= incarnation or record[CLOSED] ~= 1 or record[ACTIVE] ~= '' or record[LOADING] ~= '' then
    return 0
  end
  redis.call('HDEL', steps, worker)
  return redis.call('HDEL', workers, worker)
end)
