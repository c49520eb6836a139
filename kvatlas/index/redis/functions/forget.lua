-- forget: drops the record of a worker that is closed and holds nothing, if it still has this incarnation.
-- KEYS: workers   ARGV: worker id, incarnation (8 bytes)   returns 1 or 0
redis.register_function({ function_name = 'kvatlas_forget', flags = { 'allow-oom' }, callback = function(keys, args)
  local packed = redis.call('HGET', keys[1], args[1])
  if not packed then
    return 0
  end
  local record = cmsgpack.unpack(packed)
  if record[INC] ~= args[2] or record[CLOSED] ~= 1 or record[ACTIVE] ~= '' or record[LOADING] ~= '' then
    return 0
  end
  return redis.call('HDEL', keys[1], args[1])
end })
