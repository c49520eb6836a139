-- set_position: compares and sets a partition's position. If a position is replaced, all the partition's workers become bad.
--
-- KEYS 1 partitions
--      2 workers
-- ARGV 1 partition
--      2 expected: "<stream creation us> <stream seq>", '' for none
--      3 new
-- returns what is stored after the call
register_always('kvatlas_set_position', function(keys, args)
  local partitions, workers, partition, expected, new = keys[1], keys[2], args[1], args[2], args[3]
  local stored = redis.call('HGET', partitions, partition) or ''
  if stored ~= expected then
    return stored
  end
  redis.call('HSET', partitions, partition, new)
  if expected ~= '' then
    local flat = redis.call('HGETALL', workers)
    for i = 1, #flat, 2 do
      local worker, record = flat[i], cmsgpack.unpack(flat[i + 1])
      if record[PARTITION] == tonumber(partition) then
        record[BAD] = 1
        redis.call('HSET', workers, worker, cmsgpack.pack(record))
      end
    end
  end
  return new
end)
