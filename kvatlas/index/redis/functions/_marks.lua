-- Marks say at which of its blocks a holder can resume a prompt. Only the holders of hybrid models have them, because holding a
-- block is not enough there. See kvatlas/index/mark_lookup.py for what heads are, _mark_lookup.lua for how they are read, and
-- _slot.lua for the keys.
--
-- marks of a holder: {dropped = blocks between a position and its mark, words = digest (MarkDigest), changed = must be stored}

local SEGMENT = 64 -- blocks in a segment; its head has one bit for each
local MARK, HEAD = 3, 11 -- bytes of an entry: of a marked block (holder), of a head (holder, 64 bits)
local SHORT = 1024 -- in values of up to this many bytes, a plain search is faster than a binary one
local MARK_WORDS = 6
local HEAD_SUFFIX = 'h' -- follows the hash in the field of a head in marks:<scope id>

-- Returns how many bytes an entry has in this field of marks.
local function entry_size(field)
  return #field == 8 and MARK or HEAD
end

local function pack_marks(marks)
  return string.char(marks.dropped) .. cmsgpack.pack(marks.words)
end

local function unpack_marks(packed)
  return { dropped = string.byte(packed, 1) or 0, words = unpack_words(string.sub(packed, 2), MARK_WORDS) }
end

local function new_marks(dropped)
  return { dropped = dropped, words = { 0, 0, 0, 0, 0, 0 }, changed = true }
end

-- Returns a holder's marks, including changes by this call; false: the holder has no marks.
local function marks_for(c, holder)
  local marks = c.marks[holder]
  if marks == nil then
    local packed = redis.call('HGET', c.k.marked, holder)
    marks = packed and unpack_marks(packed) or false
    c.marks[holder] = marks
  end
  return marks
end

local function number_at(value, at)
  local a, b, c = string.byte(value, at, at + 2)
  return (a * 256 + b) * 256 + c
end

-- Looks for an entry that begins with a number, among the entries from `low` (counted from 0) to just before `high`, of `size`
-- bytes each. Returns its position (nil if there is none), and the number of entries before it or before the place where it
-- belongs.
local function place_between(value, number, size, low, high)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local here = number_at(value, middle * size + 1)
    if here == number then
      return middle * size + 1, middle
    elseif here < number then
      low = middle + 1
    else
      high = middle
    end
  end
  return nil, low
end

-- Does the same for all entries from `low` on. If numbers are looked up in ascending order, the next one is mostly found
-- immediately.
local function place_after(value, number, size, low)
  local count, at, step = #value / size, low, 1
  while at < count and number_at(value, at * size + 1) < number do
    low, at, step = at + 1, at + step, step * 2
  end
  return place_between(value, number, size, low, math.min(at + 1, count))
end

-- Returns the position of the entry of `size` bytes that begins with the holder's number; if there is none, nil and the
-- position where it belongs.
local function place_sized(value, holder, size)
  local at, before = place_between(value, number_of(holder), size, 0, #value / size)
  return at, before * size + 1
end

-- Returns the position of the entry of `size` bytes that begins with the holder's number; nil if there is none.
local function find_sized(value, holder, size)
  if #value > SHORT then
    return (place_sized(value, holder, size))
  end
  local at = string.find(value, holder, 1, true)
  while at and at % size ~= 1 do
    at = string.find(value, holder, at + 1, true)
  end
  return at
end

-- Marks blocks for a holder (`on` true) or unmarks them (false). key: the scope's marks; scope: see change_blocks
local function change_marks(key, scope, holder, marks, packed, on)
  local hashes, sub = distinct(split(packed)), string.sub
  for first = 1, #hashes, PART do
    local last = math.min(first + PART - 1, #hashes)
    local values = redis.call('HMGET', key, unpack(hashes, first, last))
    local set, gone, changed = {}, {}, {}
    for i = first, last do
      local value = values[i - first + 1] or ''
      local at, slot = place_sized(value, holder, MARK)
      if on ~= (at ~= nil) then
        changed[#changed + 1] = hashes[i]
        if on then
          value = sub(value, 1, slot - 1) .. holder .. sub(value, slot)
        else
          value = sub(value, 1, at - 1) .. sub(value, at + MARK)
        end
        if value == '' then
          gone[#gone + 1] = hashes[i]
        else
          set[#set + 1] = hashes[i]
          set[#set + 1] = value
        end
      end
    end
    if #set > 0 then
      redis.call('HSET', key, unpack(set))
    end
    if #gone > 0 then
      redis.call('HDEL', key, unpack(gone))
    end
    if #changed > 0 then
      count_blocks(marks.words, 0, table.concat(changed), scope, on and 1 or -1)
      marks.changed = true
    end
  end
end

local NO_BITS = '\0\0\0\0\0\0\0\0'

-- Adds a head of a scope (its hash and its 8 bytes of bits) to a digest of marks (sign 1), or removes it from there (sign -1).
local function count_head(words, hash, bits, scope, sign)
  if bits == NO_BITS then
    return
  end
  local low, high = struct.unpack('<I4I4', hash)
  local bits_high, bits_low = struct.unpack('>I4I4', bits)
  low = (low % 1048576 - low % 2 + 1) * bits_low % TWO32 * scope.mix_low
  high = (high % 1048576 - high % 2 + 1) * bits_high % TWO32 * scope.mix_high
  words[4] = words[4] + sign
  words[5] = (words[5] + sign * (low % TWO32)) % TWO32
  words[6] = (words[6] + sign * (high % TWO32)) % TWO32
end

-- Sets a holder's bits in heads; if all bits of a head are 0, the holder has no entry there. packed, bits: 8 bytes for each
-- head
local function change_heads(key, scope, holder, marks, packed, bits)
  local hashes, sub, fields = split(packed), string.sub, {}
  for i = 1, #hashes do
    fields[i] = hashes[i] .. HEAD_SUFFIX
  end
  for first = 1, #fields, PART do
    local last = math.min(first + PART - 1, #fields)
    local found, news = redis.call('HMGET', key, unpack(fields, first, last)), {}
    for i = first, last do
      local value = news[fields[i]] or found[i - first + 1] or '' -- the same head may come twice in an event
      local at, slot = place_sized(value, holder, HEAD)
      local old, new = at and sub(value, at + 3, at + 10) or NO_BITS, sub(bits, 8 * i - 7, 8 * i)
      if new ~= old then
        count_head(marks.words, hashes[i], old, scope, -1)
        count_head(marks.words, hashes[i], new, scope, 1)
        marks.changed = true
        local entry = new ~= NO_BITS and holder .. new or ''
        value = sub(value, 1, (at or slot) - 1) .. entry .. sub(value, at and at + HEAD or slot)
        news[fields[i]] = value
      end
    end
    local set, gone = {}, {}
    for field, value in pairs(news) do
      if value == '' then
        gone[#gone + 1] = field
      else
        set[#set + 1] = field
        set[#set + 1] = value
      end
    end
    if #set > 0 then
      redis.call('HSET', key, unpack(set))
    end
    if #gone > 0 then
      redis.call('HDEL', key, unpack(gone))
    end
  end
end
