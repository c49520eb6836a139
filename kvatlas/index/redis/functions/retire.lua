-- retire: close a worker's incarnation if the record still has it.
-- KEYS: workers, holders, active, retired, meta   ARGV: worker id, incarnation (8 bytes)   returns 1 or 0
redis.register_function({ function_name = 'kvatlas_retire', flags = { 'allow-oom' }, callback = function(keys, args)
  local k = { holders = keys[2], active = keys[3], retired = keys[4], meta = keys[5] }
  local packed = redis.call('HGET', keys[1], args[1])
  if not packed then
    return 0
  end
  local record = cmsgpack.unpack(packed)
  if record[INC] ~= args[2] or (record[CLOSED] == 1 and record[ACTIVE] == '' and record[LOADING] == '') then
    return 0
  end
  close_worker(k, record, args[1])
  redis.call('HSET', keys[1], args[1], cmsgpack.pack(record))
  return 1
end })
