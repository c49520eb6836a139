-- set_position: compare and set; where a position is replaced, all the partition's workers become doubtful.
-- KEYS: partitions, workers   ARGV: partition, expected or '', new, "<stream creation us> <stream seq>" each
-- returns what is stored after the call
redis.register_function({ function_name = 'kvatlas_set_position', flags = { 'allow-oom' }, callback = function(keys, args)
  local stored = redis.call('HGET', keys[1], args[1]) or ''
  if stored ~= args[2] then
    return stored
  end
  redis.call('HSET', keys[1], args[1], args[3])
  if args[2] ~= '' then
    local flat = redis.call('HGETALL', keys[2])
    for i = 1, #flat, 2 do
      local record = cmsgpack.unpack(flat[i + 1])
      if record[PARTITION] == tonumber(args[1]) then
        record[BAD] = 1
        redis.call('HSET', keys[2], flat[i], cmsgpack.pack(record))
      end
    end
  end
  return args[3]
end })
