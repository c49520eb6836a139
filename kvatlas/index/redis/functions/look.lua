-- look: the flags of a worker's active holder in the given blocks, and the worker's state at that moment.
--
-- KEYS 1 workers
--      2 holders
--      3 active
--      4 digests
--      5 steps
--      6 marked
--      7... blocks of each scope
-- ARGV 1 worker
--      2... packed hashes of each scope
-- returns msgpack {server, state or false, {the hashes' flags, a byte each...}}; state: see state_of
register_read_only('kvatlas_look', function(keys, args)
  local state, holder = state_of(keys, 1, args[1])
  local flags = {}
  for i = 2, #args do
    local hashes, blocks, seen = split(args[i]), keys[5 + i], {}
    for first = 1, #hashes, CHUNK do
      local last = math.min(first + CHUNK - 1, #hashes)
      local values = redis.call('HMGET', blocks, unpack(hashes, first, last))
      for j = first, last do
        local value = values[j - first + 1]
        local at = state and value and find_entry(value, holder)
        seen[j] = string.char(at and string.byte(value, at + 3) or 0)
      end
    end
    flags[i - 1] = table.concat(seen)
  end
  return cmsgpack.pack({ server_id(), state, flags })
end, MOST_LOOKED, MOST_LOOKED_BYTES)
