-- apply: folds messages of one shard's partitions into workers' records, holders, blocks and digests, in one call.
--
-- One argument, msgpack: {reuse ms, {scope id...}, {{partition, creation, after seq, seq}...},
--   {{worker, partition, {scope id -> block size and block bytes (2 x u32 BE)}, {{incarnation, first seq, last seq,
--   events}...}}...}}; events as on the wire, those with hashes followed by the two sums of these
-- KEYS: workers, holders, active, retired, free, digests, touched, partitions, meta, then blocks of each scope id in order,
--   then with the side index children and parents of each
-- returns msgpack {counts in ANSWER's order, {moved partition...}, {worker, record...}}
local ANSWER = { 'applied', 'duplicates', 'stale', 'gaps', 'refused', 'failed_checks', 'stored', 'removed', 'bytes' }

local function apply(keys, args, oom)
  local call = cmsgpack.unpack(args[1])
  local k = {
    workers = keys[1], holders = keys[2], active = keys[3], retired = keys[4], free = keys[5], digests = keys[6],
    touched = keys[7], partitions = keys[8], meta = keys[9],
  }
  local ids, scopes, sided = call[2], {}, #keys > 9 + #call[2]
  for i = 1, #ids do
    local mix_low, mix_high = mix_of(ids[i])
    local side = sided and { children = keys[9 + #ids + 2 * i - 1], parents = keys[9 + #ids + 2 * i] } or nil
    scopes[ids[i]] = { blocks = keys[9 + i], mix_low = mix_low, mix_high = mix_high, side = side }
  end
  local count = {}
  for _, name in ipairs(ANSWER) do
    count[name] = 0
  end
  local moved, skip = {}, {}
  for _, part in ipairs(call[3]) do
    local partition, creation, after, seq = part[1], part[2], part[3], part[4]
    local stored_creation, stored_seq = string.match(redis.call('HGET', k.partitions, partition) or '', '^(%d+) (%d+)$')
    if tonumber(stored_creation) ~= creation or tonumber(stored_seq) < after then
      moved[#moved + 1] = partition
      skip[partition] = true
    elseif tonumber(stored_seq) < seq then
      redis.call('HSET', k.partitions, partition, string.format('%.0f %.0f', creation, seq))
    end
  end
  local c = { k = k, scopes = scopes, reuse_ms = call[1], oom = oom, count = count }
  local names, tellers, write = {}, {}, {}
  for _, told in ipairs(call[4]) do
    if not skip[told[2]] then
      names[#names + 1] = told[1]
      tellers[#tellers + 1] = told
    end
  end
  for first = 1, #names, CHUNK do
    local last = math.min(first + CHUNK - 1, #names)
    local packed = redis.call('HMGET', k.workers, unpack(names, first, last))
    for i = first, last do
      local told = tellers[i]
      local record = packed[i - first + 1] and cmsgpack.unpack(packed[i - first + 1]) or new_record(told[2])
      local self = { c = c, worker = told[1], record = record, uses = told[3], digests = {}, marks = {} }
      local messages = told[4]
      for j = 1, #messages do
        fold(self, messages[j][1], messages[j][2], messages[j][3], messages[j][4])
      end
      flush(self)
      for holder, digest in pairs(self.digests) do
        redis.call('HSET', k.digests, holder, cmsgpack.pack(digest))
      end
      write[2 * i - 1], write[2 * i] = told[1], cmsgpack.pack(record)
    end
    redis.call('HSET', k.workers, unpack(write, 2 * first - 1, 2 * last))
  end
  local counts = {}
  for i, name in ipairs(ANSWER) do
    counts[i] = count[name]
  end
  return cmsgpack.pack({ counts, moved, write })
end

redis.register_function('kvatlas_apply', function(keys, args)
  return apply(keys, args, false)
end)

-- apply without room: a worker whose stores can't be applied is closed, which gives memory back; the rest is as in apply.
redis.register_function({
  function_name = 'kvatlas_apply_oom',
  callback = function(keys, args)
    return apply(keys, args, true)
  end,
  flags = { 'allow-oom' },
})
