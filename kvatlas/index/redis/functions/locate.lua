-- locate: the active holders of one block.
--
-- KEYS 1 blocks of the scope
--      2 active
-- ARGV 1 hash
-- returns {flags, 3-byte number, worker id...}
register_read_only('kvatlas_locate', function(keys, args)
  local blocks, active, hash = keys[1], keys[2], args[1]
  local value, out = redis.call('HGET', blocks, hash) or '', {}
  for at = 1, #value, 4 do
    local number = string.sub(value, at, at + 2)
    local worker = redis.call('HGET', active, number)
    if worker then
      out[#out + 1] = string.byte(value, at + 3)
      out[#out + 1] = number
      out[#out + 1] = worker
    end
  end
  return out
end)
