-- stray_marks: removes entries with unknown numbers from marks: such a number may later be given to a worker.
--
-- KEYS 1 marks of the scope
--      2 holders
-- ARGV field...
-- returns how many entries it removed
register_always('kvatlas_stray_marks', function(keys, args)
  local key, holders, taken, known = keys[1], keys[2], 0, {}
  for i = 1, #args do
    local field = args[i]
    local value, rest, size = redis.call('HGET', key, field) or '', {}, entry_size(field)
    for at = 1, #value, size do
      local number = string.sub(value, at, at + 2)
      if known[number] == nil then
        known[number] = redis.call('HEXISTS', holders, number) == 1
      end
      if known[number] then
        rest[#rest + 1] = string.sub(value, at, at + size - 1)
      else
        taken = taken + 1
      end
    end
    if #rest == 0 then
      redis.call('HDEL', key, field)
    elseif #rest * size ~= #value then
      redis.call('HSET', key, field, table.concat(rest))
    end
  end
  return taken
end)
