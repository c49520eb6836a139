-- set_position: compares and sets a partition's position. Before a position is replaced, all workers of the partition are
-- marked as bad, some in each call.
--
-- KEYS 1 partitions
--      2 workers
-- ARGV 1 partition
--      2 expected: "<stream creation us> <stream seq>", '' for none
--      3 new
--      4 server on which the first call was made ('': this is the first)
--      5 cursor
--      6 count
-- returns {what is stored after the call, server, next cursor}; if the cursor is not 0, nothing is set yet: call again
register_always('kvatlas_set_position', function(keys, args)
  local partitions, workers, partition, expected, new, server = keys[1], keys[2], args[1], args[2], args[3], server_id()
  local cursor, count = args[4] == server and args[5] or '0', integer(args[6], 1, 1000)
  local stored = redis.call('HGET', partitions, partition) or ''
  stored = string.match(stored, '^%d+ %d+$') or '' -- anything else counts as no position
  if stored ~= expected then
    return { stored, server, '0' }
  end
  if expected ~= '' then
    local next_cursor, flat = unpack(redis.call('HSCAN', workers, cursor, 'COUNT', count))
    for i = 1, #flat, 2 do
      local worker, record = flat[i], cmsgpack.unpack(flat[i + 1])
      if record[PARTITION] == tonumber(partition) then
        record[BAD] = 1
        redis.call('HSET', workers, worker, cmsgpack.pack(record))
      end
    end
    if next_cursor ~= '0' then
      return { stored, server, next_cursor }
    end
  end
  redis.call('HSET', partitions, partition, new)
  return { new, server, '0' }
end)
