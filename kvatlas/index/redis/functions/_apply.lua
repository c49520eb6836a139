-- The work that apply (apply.lua) and apply_oom do.

local COUNTS = { 'applied', 'duplicates', 'stale', 'gaps', 'refused', 'failed_checks', 'stored', 'removed', 'bytes_written' }
local SHARD_KEYS, GROUP_FIELDS = 12, 4
local MOST_CALL = 4194304 -- bytes of messages in one call

-- Returns the cost of a block if all values differ and have this average length; with short, equal values, the cost is 1. Each
-- distinct value is parsed in Lua. The figures are measured: up to some length, parsing a value costs more than copying it.
local function weight_of(bytes)
  return 2 + math.min(bytes, 192) / 32 + bytes / 256
end

-- If there are few samples, only very long values are considered, because each of these is copied several times.
local LONG, FEW_SAMPLES = 2048, 2

-- Returns the cost per block of each scope, estimated from sampled values (0: not estimated), and the total cost of the
-- call.
local function weigh(keys, used)
  local weights, cost = {}, 0
  for i = 1, #used do
    local _, _, blocks, samples = unpack(used[i])
    weights[i] = 0
    if samples ~= '' then
      local hashes = split(samples)
      local values, different, bytes, seen = redis.call('HMGET', keys[SHARD_KEYS + i], unpack(hashes)), 0, 0, {}
      for j = 1, #hashes do
        local value = values[j] or ''
        bytes = bytes + #value
        different = different + (seen[value] and 0 or 1)
        seen[value] = true
      end
      bytes = bytes / #hashes
      if #hashes > FEW_SAMPLES then
        local share = (different - 1) / (#hashes - 1)
        weights[i] = 1 - share + share * weight_of(bytes)
      elseif bytes > LONG then
        weights[i] = 1 + bytes / LONG
      end
    end
    cost = cost + blocks * math.max(weights[i], 1)
  end
  return weights, cost
end

-- Moves the positions of the partitions forward. Returns the partitions whose stored position is not where their batch begins,
-- both as a list and as a set; none of their messages may be applied.
local function advance(key, batches)
  local names, moved, skip, write = {}, {}, {}, {}
  for i, batch in ipairs(batches) do
    local partition = unpack(batch)
    names[i] = partition
  end
  local positions = read_fields(key, names)
  for _, batch in ipairs(batches) do
    local partition, creation, after, seq = unpack(batch)
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

-- Returns the scopes of a call, by id; see change_blocks.
local function scopes_of(keys, used, with_marks)
  local scopes, sided = {}, #keys > SHARD_KEYS + #used + 1 + #with_marks
  for i = 1, #used do
    local scope_id, in_order = unpack(used[i])
    local mix_low, mix_high = mix_of(scope_id)
    local behind = SHARD_KEYS + #used + 2 * i
    scopes[scope_id] = {
      id = scope_id, blocks = keys[SHARD_KEYS + i], mix_low = mix_low, mix_high = mix_high, in_order = in_order == 1,
      queue = {}, side = sided and { children = keys[behind - 1], parents = keys[behind] } or nil,
    }
  end
  for i, number in ipairs(with_marks) do
    local scope_id = unpack(used[number])
    scopes[scope_id].marks = keys[#keys - #with_marks + i]
  end
  return scopes
end

-- Returns the workers of the call, except those in partitions in `skip` (see `self` in _fence.lua), each with its record and
-- with the applied steps of its next message; and the holders that they change.
local function read_workers(k, all_workers, skip)
  local workers, names, in_parts, holders = {}, {}, {}, {}
  for _, entry in ipairs(all_workers) do
    local worker, partition, uses, groups = unpack(entry)
    if not skip[partition] then
      local self = { worker = worker, partition = partition, uses = uses, groups = groups }
      names[#names + 1], workers[#workers + 1] = worker, self
      for _, group in ipairs(groups) do
        if #group > GROUP_FIELDS then
          in_parts[#in_parts + 1] = worker
          self.in_parts = true
          break
        end
      end
    end
  end
  local packed, steps = read_fields(k.workers, names), read_fields(k.steps, in_parts)
  for i, self in ipairs(workers) do
    self.record = packed[self.worker] and cmsgpack.unpack(packed[self.worker]) or new_record(self.partition)
    self.steps, self.had_steps = steps[self.worker], steps[self.worker]
    holders[i] = changing_holder(self.record)
  end
  return workers, holders
end

-- Writes the workers' records and steps. Returns {worker id, record...}.
local function write_workers(k, workers)
  local records = {}
  for i, self in ipairs(workers) do
    records[2 * i - 1], records[2 * i] = self.worker, cmsgpack.pack(self.record)
    if self.in_parts and self.steps then
      redis.call('HSET', k.steps, self.worker, self.steps)
    elseif self.in_parts and self.had_steps then
      redis.call('HDEL', k.steps, self.worker)
    end
  end
  write_fields(k.workers, records)
  return records
end

-- Writes what the call has changed in holders: digests, the scopes that they used, numbers of blocks, and marks.
local function write_holders(c)
  local k, digests, touched = c.k, {}, {}
  for holder, digest in pairs(c.digests) do
    digests[#digests + 1] = holder
    digests[#digests + 1] = cmsgpack.pack(digest)
  end
  for holder, new in pairs(c.newly_touched) do
    if new[1] or new.resized then
      touched[#touched + 1] = holder
      touched[#touched + 1] = (c.touched[holder] or '') .. table.concat(new)
    end
  end
  write_fields(k.digests, digests)
  write_fields(k.touched, touched)
  change_held(k, c.held)
  for holder, marks in pairs(c.marks) do
    if marks and marks.changed then
      redis.call('HSET', k.marked, holder, pack_marks(marks))
    end
  end
end

local function apply(keys, args, oom)
  local k = {
    workers = keys[1], holders = keys[2], active = keys[3], retired = keys[4], free = keys[5], digests = keys[6],
    touched = keys[7], partitions = keys[8], meta = keys[9], steps = keys[10], held = keys[11],
    moments = keys[12],
  }
  local reuse_ms, most_cost, used, batches, all_workers, with_marks = unpack(cmsgpack.unpack(args[1]))
  k.marked = keys[#keys - #with_marks]
  local weights, cost = weigh(keys, used)
  if cost > most_cost then
    return cmsgpack.pack({ weights })
  end
  local count = {}
  for _, name in ipairs(COUNTS) do
    count[name] = 0
  end
  local moved, skip = advance(k.partitions, batches)
  local workers, holders = read_workers(k, all_workers, skip)
  -- only holders that continue have stored digests and touched scopes; those that begin in this call have none yet
  local c = {
    k = k, scopes = scopes_of(keys, used, with_marks), reuse_ms = reuse_ms, oom = oom, count = count, digests = {}, marks = {},
    newly_touched = {}, held = {}, stored_digests = read_fields(k.digests, holders), touched = read_fields(k.touched, holders),
  }
  for _, self in ipairs(workers) do
    self.c = c
    for _, group in ipairs(self.groups) do
      fence(self, unpack(group))
    end
  end
  flush(c)
  local records = write_workers(k, workers)
  write_holders(c)
  local counts = {}
  for i, name in ipairs(COUNTS) do
    counts[i] = count[name]
  end
  return cmsgpack.pack({ weights, counts, moved, records })
end
