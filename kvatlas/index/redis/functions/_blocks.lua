-- Changes many blocks of one scope, for several holders at the same time: one HMGET, one HSET and one HDEL for hundreds of
-- blocks. Values repeat, so the new value for each old one is computed once (`known`) and then only looked up.

-- The side index records which blocks follow which. side: {children = key, parents = key}
local function link(side, hash, parent)
  if redis.call('HSETNX', side.parents, hash, parent) == 1 then
    redis.call('HSET', side.children, parent, (redis.call('HGET', side.children, parent) or '') .. hash)
  end
end

local function unlink(side, hash)
  local parent = redis.call('HGET', side.parents, hash)
  if not parent then
    return
  end
  redis.call('HDEL', side.parents, hash)
  local rest = {}
  for _, child in ipairs(split(redis.call('HGET', side.children, parent) or '')) do
    if child ~= hash then
      rest[#rest + 1] = child
    end
  end
  if #rest == 0 then
    redis.call('HDEL', side.children, parent)
  else
    redis.call('HSET', side.children, parent, table.concat(rest))
  end
end

-- Returns the value after a store, and whether it adds this tier to the holder's entry.
local function value_with(value, holder, tier_bit)
  if not value then
    return holder .. string.char(tier_bit), true
  end
  local at, slot = find_entry(value, holder)
  if not at then
    return string.sub(value, 1, slot - 1) .. holder .. string.char(tier_bit) .. string.sub(value, slot), true
  end
  local old = string.byte(value, at + 3)
  if bit.band(old, tier_bit) ~= 0 then
    return value, false
  end
  return string.sub(value, 1, at + 2) .. string.char(old + tier_bit) .. string.sub(value, at + 4), true
end

-- Returns the value after a removal (false: the block has no holder left), and whether the holder had this tier before.
local function value_without(value, holder, tier_bit)
  if not value then
    return value, false
  end
  local at = find_entry(value, holder)
  if not at then
    return value, false
  end
  local old = string.byte(value, at + 3)
  if bit.band(old, tier_bit) == 0 then
    return value, false
  end
  local new = old - tier_bit
  if bit.band(new, TIER_MASK) == 0 then
    local rest = string.sub(value, 1, at - 1) .. string.sub(value, at + 4)
    return rest ~= '' and rest, true
  end
  return string.sub(value, 1, at + 2) .. string.char(new) .. string.sub(value, at + 4), true
end

-- Returns the sums of the lower and of the upper 32-bit halves of packed hashes. The sums are exact, because there are always
-- far fewer than 2^21 hashes.
local sum_formats = {}
local function sums(packed)
  local low, high, count = 0, 0, #packed / 8
  for first = 0, count - 1, 1024 do
    local n = math.min(count - first, 1024)
    local format = sum_formats[n]
    if not format then
      format = '<' .. string.rep('I4', 2 * n)
      if n <= 64 or n == 1024 then
        sum_formats[n] = format
      end
    end
    local halves = { struct.unpack(format, packed, first * 8 + 1) }
    for i = 1, 2 * n, 2 do
      low = low + halves[i]
      high = high + halves[i + 1]
    end
  end
  return low, high
end

-- Adds blocks of one scope, given by their number and sums, to a holder's digest (sign 1), or removes them (sign -1). See
-- kvatlas/blocks/digest.py.
local function count_sums(digest, tier, count, low, high, scope, sign)
  local at = 3 * tier + 1
  digest[at] = digest[at] + sign * count
  digest[at + 1] = (digest[at + 1] + sign * (low % TWO32 * scope.mix_low % TWO32)) % TWO32
  digest[at + 2] = (digest[at + 2] + sign * (high % TWO32 * scope.mix_high % TWO32)) % TWO32
end

-- Does the same for packed hashes.
local function count_blocks(digest, tier, packed, scope, sign)
  local low, high = sums(packed)
  count_sums(digest, tier, #packed / 8, low, high, scope, sign)
end

-- Returns the hashes without repetitions.
local function distinct(hashes)
  local seen, out, n = {}, {}, 0
  for i = 1, #hashes do
    if not seen[hashes[i]] then
      seen[hashes[i]] = true
      n = n + 1
      out[n] = hashes[i]
    end
  end
  return out
end

-- Returns the field of `held` that counts a holder's blocks of a scope in a tier.
local function held_field(holder, scope_id, tier)
  return holder .. scope_id .. string.char(tier)
end

-- Returns the holders in these fields of `held`, each once.
local function holders_of(fields)
  local seen, holders = {}, {}
  for _, field in ipairs(fields) do
    local holder = string.sub(field, 1, 3)
    if not seen[holder] then
      seen[holder] = true
      holders[#holders + 1] = holder
    end
  end
  return holders
end

-- Deletes fields, thousands in one command.
local function delete_fields(key, fields)
  for first = 1, #fields, CHUNK do
    redis.call('HDEL', key, unpack(fields, first, math.min(first + CHUNK - 1, #fields)))
  end
end

-- Changes how many blocks holders have by scope and tier, and the moments of these fields. changes: {field -> difference}
local function change_held(k, changes)
  local fields, set, gone, moved = {}, {}, {}, {}
  for field, change in pairs(changes) do
    if change ~= 0 then
      fields[#fields + 1] = field
    end
  end
  local stored, moments = read_fields(k.held, fields), read_fields(k.moments, fields)
  local spans = spans_of(k.holders, holders_of(fields))
  for _, field in ipairs(fields) do
    local before = tonumber(stored[field]) or 0
    local blocks = math.max(0, before + changes[field])
    if blocks > 0 then
      set[#set + 1] = field
      set[#set + 1] = string.format('%d', blocks)
    elseif stored[field] then
      gone[#gone + 1] = field
    end
    local moment = (blocks - before) * spans[string.sub(field, 1, 3)]
    if moment ~= 0 then
      moved[#moved + 1] = field
      moved[#moved + 1] = string.format('%.17g', (tonumber(moments[field]) or 0) + moment)
    end
  end
  write_fields(k.held, set)
  write_fields(k.moments, moved)
  delete_fields(k.held, gone)
end

-- Returns the size in bytes of a block in each of a holder's scopes: {scope id -> bytes} and, for each tier with a different
-- size, {scope id and tier (a byte) -> bytes}. touched: the holder's list
local function sizes_of(touched)
  local sizes = {}
  for at = 1, #touched, 16 do
    local in_device = string.byte(touched, at + 8) == 0
    sizes[string.sub(touched, at, at + (in_device and 7 or 8))] = struct.unpack('>I4', touched, at + 12)
  end
  return sizes
end

-- Returns the size in bytes of a block; `place`: the scope's id followed by the tier's byte.
local function bytes_in(sizes, place)
  return sizes[place] or sizes[string.sub(place, 1, 8)] or 0
end

-- Returns {field, block-ms...} of some holders' scopes, without zeros.
local function block_ms_of(k, holders, scope_ids)
  local fields, found = {}, {}
  for _, holder in ipairs(holders) do
    for _, scope_id in ipairs(scope_ids) do
      for tier = 0, 4 do
        fields[#fields + 1] = held_field(holder, scope_id, tier)
      end
    end
  end
  local held, moments, spans = read_fields(k.held, fields), read_fields(k.moments, fields), spans_of(k.holders, holders)
  for _, field in ipairs(fields) do
    if held[field] or moments[field] then
      local blocks, moment = tonumber(held[field]) or 0, tonumber(moments[field]) or 0
      found[#found + 1] = field
      found[#found + 1] = blocks * spans[string.sub(field, 1, 3)] - moment
    end
  end
  return found
end

-- Adds the byte-ms of holders that no longer have any block of these scopes to `spent`.
local function settle_usage(k, holders, scope_ids)
  local found, sizes, gone = block_ms_of(k, holders, scope_ids), {}, {}
  for i = 1, #found, 2 do
    local field, block_ms = found[i], found[i + 1]
    local holder, place = string.sub(field, 1, 3), string.sub(field, 4)
    sizes[holder] = sizes[holder] or sizes_of(redis.call('HGET', k.touched, holder) or '')
    local byte_ms = block_ms * bytes_in(sizes[holder], place)
    if byte_ms > 0 then
      redis.call('HINCRBYFLOAT', k.spent, place, string.format('%.17g', byte_ms))
    end
    gone[#gone + 1] = field
  end
  delete_fields(k.moments, gone)
end

local PART = 512 -- blocks in one command: more don't fit in the processor's caches

-- Works out an operation on hashes[first..last]; the value of hashes[i] is values[i - before]. Appends {hash, new value...} to
-- `set`, which has n elements, and the hashes that are left without a holder to `gone`, which has m. Returns n, m and the
-- number of bytes to be written.
local function decide(op, hashes, values, before, first, last, set, n, gone, m)
  local known, bytes = op.known, 0
  for i = first, last do
    local value = values[i - before]
    local new = known[value]
    if new == nil then
      local counts
      if op.store then
        new, counts = value_with(value, op.holder, op.tier_bit)
      else
        new, counts = value_without(value, op.holder, op.tier_bit)
      end
      if not counts then -- the holder already has the block, or lacks the block that it should lose
        op.uncounted = op.uncounted or {}
        op.uncounted[hashes[i]] = true
      else
        known[value] = new
      end
    end
    if not new then
      if value then
        m = m + 1
        gone[m] = hashes[i]
      end
    elseif new ~= value then
      set[n + 1], set[n + 2] = hashes[i], new
      n = n + 2
      bytes = bytes + 8 + #new
    end
  end
  return n, m, bytes
end

-- Updates the holder's digest with what an operation has changed in hashes[first..last]. Returns how many blocks have changed.
local function settle(op, hashes, first, last)
  local sign = op.store and 1 or -1
  if not op.uncounted and last - first + 1 == op.size then
    count_sums(op.digest, op.tier, op.size, op.low, op.high, op.scope, sign)
    return op.size
  end
  local changed, c = {}, 0
  for i = first, last do
    if not (op.uncounted and op.uncounted[hashes[i]]) then
      c = c + 1
      changed[c] = hashes[i]
    end
  end
  if c > 0 then
    count_blocks(op.digest, op.tier, table.concat(changed), op.scope, sign)
  end
  return c
end

-- Carries out operations on blocks of one scope: one operation, or several that have no block in common.
-- op: {scope, holder, tier, tier_bit, store = true or false, digest, known = {}, parts = {packed hashes...},
--   size = number of hashes in the parts, low, high = their sums as computed by apply_call.py}; no part repeats a hash
-- scope: {id, blocks = key, mix_low, mix_high, side or nil}; count: see COUNTS in _apply.lua. Sets op.changed to the
-- change in the number of the holder's blocks in the tier.
local function change_blocks(scope, ops, count)
  local packed, total = {}, 0
  for _, op in ipairs(ops) do
    for _, part in ipairs(op.parts) do
      packed[#packed + 1] = part
    end
    total = total + op.size
    op.last = total
  end
  local hashes = split(table.concat(packed))
  if #ops == 1 and #packed > 1 then
    hashes = distinct(hashes)
    ops[1].last = #hashes
  end
  local at, from = 1, 1 -- the operation, and its first hash
  for first = 1, #hashes, PART do
    local last = math.min(first + PART - 1, #hashes)
    local values = redis.call('HMGET', scope.blocks, unpack(hashes, first, last))
    local set, gone, n, m, i = {}, {}, 0, 0, first
    while i <= last do
      local op = ops[at]
      local stop = math.min(op.last, last)
      local bytes
      n, m, bytes = decide(op, hashes, values, first - 1, i, stop, set, n, gone, m)
      count.bytes_written = count.bytes_written + bytes
      if stop == op.last then
        local name = op.store and 'stored' or 'removed'
        local changed = settle(op, hashes, from, stop)
        count[name] = count[name] + changed
        op.changed = op.store and changed or -changed
        at, from = at + 1, stop + 1
      end
      i = stop + 1
    end
    if n > 0 then
      redis.call('HSET', scope.blocks, unpack(set, 1, n))
    end
    if m > 0 then
      redis.call('HDEL', scope.blocks, unpack(gone, 1, m))
      if scope.side then
        for j = 1, m do
          unlink(scope.side, gone[j])
        end
      end
    end
  end
end
