-- sweep: takes retired holders out of one scope's blocks, a part at a time.
--
-- KEYS 1 blocks of the scope
--      2 retired
--      3 digests
--      4 children, 5 parents: only with the side index
-- ARGV 1 scope id
--      2 cursor
--      3 count
--      4... holders
-- returns {next cursor, entries taken out, the server's run id: a cursor means nothing to another server}
register_always('kvatlas_sweep', function(keys, args)
  local blocks, retired, digests = keys[1], keys[2], keys[3]
  local side = keys[4] and { children = keys[4], parents = keys[5] } or nil
  local scope_id, cursor, count = args[1], args[2], args[3]
  local scope = {}
  scope.mix_low, scope.mix_high = mix_of(scope_id)
  local digest_by_holder, holders = {}, {}
  for i = 4, #args do
    local holder = args[i]
    if redis.call('SISMEMBER', retired, holder) == 1 then
      holders[#holders + 1] = holder
      digest_by_holder[holder] = read_digest(digests, holder)
    end
  end
  local next_cursor, flat = unpack(redis.call('HSCAN', blocks, cursor, 'COUNT', count))
  local taken = 0
  for i = 1, #flat, 2 do
    local hash, value = flat[i], flat[i + 1]
    local rest = value
    for j = 1, #holders do
      local holder = holders[j]
      local at = find_entry(rest, holder)
      if at then
        local flags = string.byte(rest, at + 3) or 0 -- or torn
        for tier = 0, 4 do
          if bit.band(flags, 2 ^ tier) ~= 0 then
            count_blocks(digest_by_holder[holder], tier, hash, scope, -1)
          end
        end
        rest = string.sub(rest, 1, at - 1) .. string.sub(rest, at + 4)
        taken = taken + 1
      end
    end
    if rest == '' then
      redis.call('HDEL', blocks, hash)
      if side then
        unlink(side, hash)
      end
    elseif rest ~= value then
      redis.call('HSET', blocks, hash, rest)
    end
  end
  for holder, digest in pairs(digest_by_holder) do
    redis.call('HSET', digests, holder, cmsgpack.pack(digest))
  end
  return { next_cursor, taken, string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or '' }
end)
