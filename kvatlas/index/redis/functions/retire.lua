-- retire: closes a worker's incarnation, if the record still has it.
--
-- KEYS 1 workers
--      2 holders
--      3 active
--      4 retired
--      5 meta
-- ARGV 1 worker id
--      2 incarnation (8 bytes)
-- returns 1 or 0
register_always('kvatlas_retire', function(keys, args)
  local k = { workers = keys[1], holders = keys[2], active = keys[3], retired = keys[4], meta = keys[5] }
  local worker, incarnation = args[1], args[2]
  local packed = redis.call('HGET', k.workers, worker)
  if not packed then
    return 0
  end
  local record = cmsgpack.unpack(packed)
  if record[INCARNATION] ~= incarnation or (record[CLOSED] == 1 and record[ACTIVE] == '' and record[LOADING] == '') then
    return 0
  end
  close_worker(k, record, worker)
  redis.call('HSET', k.workers, worker, cmsgpack.pack(record))
  return 1
end)
