-- strays: removes entries with unknown numbers from blocks: such a number may later be given to a worker.
--
-- KEYS 1 blocks of the scope
--      2 holders
--      3 children, 4 parents: only with the side index
-- ARGV hash...
-- returns how many entries it removed
register_always('kvatlas_strays', function(keys, args)
  local blocks, holders, taken = keys[1], keys[2], 0
  local side = keys[3] and { children = keys[3], parents = keys[4] } or nil
  local known = setmetatable({}, {
    __index = function(self, number)
      self[number] = redis.call('HEXISTS', holders, number) == 1
      return rawget(self, number)
    end,
  })
  for i = 1, #args do
    local hash = args[i]
    local value, rest = redis.call('HGET', blocks, hash) or '', {}
    for at = 1, #value, 4 do
      if known[string.sub(value, at, at + 2)] then
        rest[#rest + 1] = string.sub(value, at, at + 3)
      else
        taken = taken + 1
      end
    end
    if #rest == 0 then
      redis.call('HDEL', blocks, hash)
      if side then
        unlink(side, hash)
      end
    elseif #rest * 4 ~= #value then
      redis.call('HSET', blocks, hash, table.concat(rest))
    end
  end
  return taken
end)
