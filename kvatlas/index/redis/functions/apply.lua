-- apply: folds messages of one shard's partitions into workers' records, holders, blocks and digests, in one call.
--
-- Whatever the fold needs is read in one command for all workers, and written in one.
--
-- One argument, msgpack: {reuse ms, {{scope id, 1 where two events may be of one block, otherwise 0}...},
--   {{partition, creation, after seq, seq}...},
--   {{worker, partition, {scope id -> block size and block bytes (2 x u32 BE)}, {{incarnation, first seq, last seq,
--   events}...}}...}}; events as on the wire, those with hashes followed by the two sums of these; no event repeats a block
-- KEYS: workers, holders, active, retired, free, digests, touched, partitions, meta, then blocks of each scope id in order,
--   then with the side index children and parents of each
-- returns msgpack {counts in ANSWER's order, {moved partition...}, {worker, record...}}
local ANSWER = { 'applied', 'duplicates', 'stale', 'gaps', 'refused', 'failed_checks', 'stored', 'removed', 'bytes' }

-- Moves the partitions' positions on. Returns the partitions whose stored position is not where their batch begins: of these
-- nothing may be applied.
local function advance(key, parts)
  local names, moved, skip, write = {}, {}, {}, {}
  for i, part in ipairs(parts) do
    names[i] = part[1]
  end
  local positions = read_fields(key, names)
  for _, part in ipairs(parts) do
    local partition, creation, after, seq = part[1], part[2], part[3], part[4]
    local stored_creation, stored_seq = string.match(positions[partition] or '', '^(%d+) (%d+)$')
    if tonumber(stored_creation) ~= creation or tonumber(stored_seq) < after then
      moved[#moved + 1] = partition
      skip[partition] = true
    elseif tonumber(stored_seq) < seq then
      positions[partition] = string.format('%.0f %.0f', creation, seq)
      write[#write + 1] = partition
      write[#write + 1] = positions[partition]
    end
  end
  write_fields(key, write)
  return moved, skip
end

local function apply(keys, args, oom)
  local call = cmsgpack.unpack(args[1])
  local k = {
    workers = keys[1], holders = keys[2], active = keys[3], retired = keys[4], free = keys[5], digests = keys[6],
    touched = keys[7], partitions = keys[8], meta = keys[9],
  }
  local used, scopes, sided = call[2], {}, #keys > 9 + #call[2]
  for i = 1, #used do
    local mix_low, mix_high = mix_of(used[i][1])
    local side = sided and { children = keys[9 + #used + 2 * i - 1], parents = keys[9 + #used + 2 * i] } or nil
    scopes[used[i][1]] = {
      blocks = keys[9 + i], mix_low = mix_low, mix_high = mix_high, side = side, in_order = used[i][2] == 1, queue = {},
    }
  end
  local count = {}
  for _, name in ipairs(ANSWER) do
    count[name] = 0
  end
  local moved, skip = advance(k.partitions, call[3])

  local names, tellers, holders = {}, {}, {}
  for _, told in ipairs(call[4]) do
    if not skip[told[2]] then
      names[#names + 1] = told[1]
      tellers[#tellers + 1] = told
    end
  end
  local packed = read_fields(k.workers, names)
  for i, name in ipairs(names) do
    local record = packed[name] and cmsgpack.unpack(packed[name]) or new_record(tellers[i][2])
    tellers[i].record = record
    holders[i] = record[LOADING] ~= '' and record[LOADING] or record[ACTIVE]
  end
  -- of the holders that go on; those that begin in this call have nothing yet
  local c = {
    k = k, scopes = scopes, reuse_ms = call[1], oom = oom, count = count, digests = {}, newly_touched = {},
    stored_digests = read_fields(k.digests, holders), touched = read_fields(k.touched, holders),
  }
  for _, told in ipairs(tellers) do
    local self = { c = c, worker = told[1], record = told.record, uses = told[3] }
    for _, message in ipairs(told[4]) do
      fold(self, message[1], message[2], message[3], message[4])
    end
  end
  flush(c)
  local records, digests, touched = {}, {}, {}
  for i, told in ipairs(tellers) do
    records[2 * i - 1], records[2 * i] = told[1], cmsgpack.pack(told.record)
  end
  for holder, digest in pairs(c.digests) do
    digests[#digests + 1] = holder
    digests[#digests + 1] = cmsgpack.pack(digest)
  end
  for holder in pairs(c.newly_touched) do
    touched[#touched + 1] = holder
    touched[#touched + 1] = c.touched[holder]
  end
  write_fields(k.workers, records)
  write_fields(k.digests, digests)
  write_fields(k.touched, touched)
  local counts = {}
  for i, name in ipairs(ANSWER) do
    counts[i] = count[name]
  end
  return cmsgpack.pack({ counts, moved, records })
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
