-- sweep: takes retired holders out of one scope's blocks, a part at a time.
-- KEYS: blocks of the scope, retired, digests [, children, parents]   ARGV: scope id, cursor, count, holder...
-- returns {next cursor, entries taken out, the server's run id: a cursor means nothing to another server}
redis.register_function({
  function_name = 'kvatlas_sweep',
  callback = function(keys, args)
    local scope = {}
    scope.mix_low, scope.mix_high = mix_of(args[1])
    local side = keys[4] and { children = keys[4], parents = keys[5] } or nil
    local digests, holders = {}, {}
    for i = 4, #args do
      if redis.call('SISMEMBER', keys[2], args[i]) == 1 then
        holders[#holders + 1] = args[i]
        digests[args[i]] = read_digest(keys[3], args[i])
      end
    end
    local answer = redis.call('HSCAN', keys[1], args[2], 'COUNT', args[3])
    local taken, pairs_ = 0, answer[2]
    for i = 1, #pairs_, 2 do
      local hash, value = pairs_[i], pairs_[i + 1]
      local rest = value
      for j = 1, #holders do
        local at = find_entry(rest, holders[j])
        if at then
          local flags = string.byte(rest, at + 3) or 0 -- or torn
          for tier = 0, 4 do
            if bit.band(flags, 2 ^ tier) ~= 0 then
              count_blocks(digests[holders[j]], tier, hash, scope, -1)
            end
          end
          rest = string.sub(rest, 1, at - 1) .. string.sub(rest, at + 4)
          taken = taken + 1
        end
      end
      if rest == '' then
        redis.call('HDEL', keys[1], hash)
        if side then
          unlink(side, hash)
        end
      elseif rest ~= value then
        redis.call('HSET', keys[1], hash, rest)
      end
    end
    for holder, digest in pairs(digests) do
      redis.call('HSET', keys[3], holder, cmsgpack.pack(digest))
    end
    return { answer[1], taken, string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or '' }
  end,
  flags = { 'allow-oom' },
})
