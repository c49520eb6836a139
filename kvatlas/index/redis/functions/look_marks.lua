-- look_marks: the entries of a worker's active holder in the given fields of marks, and the worker's state at that moment.
--
-- KEYS 1 workers
--      2 holders
--      3 active
--      4 digests
--      5 steps
--      6 marked
--      7... marks of each scope
-- ARGV 1 worker
--      2... msgpack {field...} of each scope
-- returns msgpack {server, state or false, {{bits of each field ('' of a mark; false: nothing)...} of each scope...}}
register_read_only('kvatlas_look_marks', function(keys, args)
  local state, holder = state_of(keys, 1, args[1])
  local entries = {}
  for i = 2, #args do
    local fields, seen = cmsgpack.unpack(args[i]), {}
    local values = read_fields(keys[i + 5], fields)
    for j = 1, #fields do
      local value, size = values[fields[j]], entry_size(fields[j])
      local at = state and value and find_sized(value, holder, size)
      seen[j] = at and string.sub(value, at + 3, at + size - 1) or false
    end
    entries[i - 1] = seen
  end
  return cmsgpack.pack({ server_id(), state, entries })
end, MOST_LOOKED, MOST_LOOKED_BYTES)
